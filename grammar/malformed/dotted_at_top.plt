data.batch = 64
