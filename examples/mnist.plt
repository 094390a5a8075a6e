# Handwritten digits from the files as they are published; `dslc check` says how to fetch them.
model {
  network = convnet(channels = [32, 64])
  loss    = cross_entropy()
}

data {
  source = mnist("mnist")
  batch  = 128
}

devices {
  cpus = 2
}

train {
  epochs    = 3
  optimizer = adam(lr = 1e-3)
}

evaluate {
  metrics = [loss, accuracy]
}
