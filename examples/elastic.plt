# Handwritten digits on one to three machines, which come and go while it trains. On each of them:
# `dslc run examples/elastic.plt --out runs/elastic --rendezvous node-a`, and on one more whenever you like. In pods:
# `dslc submit examples/elastic.plt --set 'launch.with=kubernetes(image = "registry/dslc:1", volumes = "training:/runs")'`.
model {
  network = [flatten(), linear(16), relu(), linear(10)]
  loss    = cross_entropy()
}

data {
  source     = digits()
  batch      = 48
  validation = 10%
}

devices {
  nodes = 1..3
  cpus  = 1
}

train {
  steps     = 400
  optimizer = sgd(lr = 0.1, momentum = 0.9)
}

checkpoint {
  every = 20 steps
}

launch {
  restarts = 1
  timeout  = 60s
}

log {
  every       = 1 step
  tensorboard = false
}
