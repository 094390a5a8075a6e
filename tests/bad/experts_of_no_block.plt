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
    activation   = gelu,  #! E0235
    dense_layers = 2,  #! E0236
    experts      = moe(experts = 4, top_k = 2, hidden = 24),
  )
}
