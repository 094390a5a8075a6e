import "base/digits.plt"

model {
  network = gpt(layers = 1, width = 8, heads = 2, context = 8)
}

data {
  source = text("no_such_file.txt") #! W0309
}
