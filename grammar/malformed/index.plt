param n = sizes[0]
