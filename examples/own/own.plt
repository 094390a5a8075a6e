# A network and a data set of your own: two functions in net.py beside this file, called as they are.
model {
  network = python("net:network", width = 64)
  loss    = cross_entropy()
}

data {
  source = python("net:data")
  batch  = 32
}

devices {
  cpus = 2
}

train {
  epochs    = 5
  optimizer = adamw(lr = 3e-3)
}

evaluate {
  every   = 1 epoch
  metrics = [loss, accuracy]
}
