model {
  network = gpt(betas = [1, 2
