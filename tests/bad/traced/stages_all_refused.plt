import "../base/own.plt"

model {
  network = python("chains:Chosen")
}

data {
  source = digits()
}

devices {
  cpus = 4
}

parallelism {
  pipeline = 4
  stages   = [1, 1, 1, 1] #! E0432 E0435
}
