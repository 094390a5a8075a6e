import "base/digits.plt"

model {
  loss = contrastive(over = all)
}

parallelism {
  pipeline = 2 #! E0627
}

devices {
  cpus = 2
}
