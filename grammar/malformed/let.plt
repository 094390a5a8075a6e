let width = 256
