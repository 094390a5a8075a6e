import "base/gpt.plt"

data {
  source = stdlib(context = 16)
}

model {
  network = llama(
    layers       = 2,
    width        = 32,
    heads        = 4,
    context      = 16,
    vocab        = 256,
    hidden       = 64,
    dense_layers = 1,  #! W0103
  )
}
