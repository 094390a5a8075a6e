import "base/digits.plt"

devices {
  cpus = 2
}

parallelism {
  gradients = local_sgd(period = 4) #! E0631 E0631 E0631 E0631 W0630
}

train {
  clip = 1.0
  ema  = 0.99
  check_replicas = 100 steps
  on_spike = stop
}
