model
  network = gpt()

hello
