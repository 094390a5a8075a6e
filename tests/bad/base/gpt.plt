# What the bad jobs beside this folder start from: good as it is.
model {
  network = gpt(layers = 4, width = 64, heads = 4, context = 32, vocab = 256)
  loss    = cross_entropy()
}

data {
  source = stdlib()
  batch  = 16
}

devices {
  cpus = 4
}

train {
  steps     = 10
  optimizer = adamw()
}
