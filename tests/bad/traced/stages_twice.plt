import "../base/own.plt"

model {
  network = python("chains:Twice")
}

data {
  source = digits()
}

parallelism {
  pipeline     = 2
  microbatches = 4
  stages       = [1, 2, 1, 1]
  schedule     = zero_bubble #! W0664
}
