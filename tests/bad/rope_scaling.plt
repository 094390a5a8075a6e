import "base/gpt.plt"

model {
  network = llama(
    layers = 2, width = 32, heads = 4, hidden = 48, context = 16,
    rope_scaling = llama3(factor = 8, low_freq_factor = 5),  #! E0225
  )
}

data {
  source = stdlib(context = 16)
}
