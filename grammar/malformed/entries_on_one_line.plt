data { batch = 64 shuffle = true }
