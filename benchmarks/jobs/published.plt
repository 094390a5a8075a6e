# A GPT, to which benchmarks/published.py gives the sizes of a published run.
model {
  network = gpt(layers = 24, width = 1024, heads = 16, context = 1024, vocab = 50_304, tie = true)
  loss    = cross_entropy()
}

data {
  source = synthetic(samples = 1_000_000, vocab = 50_304)
  batch  = 16
}

devices {
  gpus = 8
  kind = a100_40g
}

train {
  steps     = 100
  precision = bf16(level = O2)
  optimizer = adamw(lr = 1e-4)
}
