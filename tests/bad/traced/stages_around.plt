import "../base/own.plt"

model {
  network = python("chains:Around")
}

data {
  source = digits()
}

parallelism {
  pipeline = 2
  stages   = [1, 2] #! E0435
}
