import "../base/own.plt"

model {
  network = python("chains:Normed")
}

data {
  source = digits()
  batch  = 2
}

devices {
  cpus = 1
}

parallelism {
  microbatches = 2 #! W0606 E0314
}
