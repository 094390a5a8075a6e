[data]
batch = 64
