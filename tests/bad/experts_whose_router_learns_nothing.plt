import "base/gpt.plt"

data {
  source = stdlib(context = 16)
}

model {
  network = llama(
    layers  = 2,
    width   = 32,
    heads   = 4,
    context = 16,
    vocab   = 256,
    experts = moe(experts = 4, top_k = 1, hidden = 24, balance = bias()),  #! W0237
  )
}
