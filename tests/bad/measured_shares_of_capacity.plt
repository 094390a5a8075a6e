model {
  network = [embedding(width = 32), moe(8, 2, hidden = 48, capacity = 1.25), linear(256)] #! W0238
  loss    = cross_entropy()
}

data {
  source = stdlib(context = 32)
  batch  = 16
}

devices {
  cpus = 2
}

parallelism {
  data_shares = measured #! E0343
}

train {
  steps     = 10
  optimizer = adamw()
}
