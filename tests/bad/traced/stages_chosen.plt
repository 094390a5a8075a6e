import "../base/own.plt"

model {
  network = python("chains:Chosen")
}

data {
  source = digits()
}

parallelism {
  pipeline = 2
  stages   = [2, 2] #! E0435
}
