import "../base/digits.plt"

train {
  optimizer = python("optimizers:Noisy", lr = 0.1) #! E0615
}

devices {
  cpus = 2
}
