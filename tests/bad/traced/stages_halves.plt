import "../base/own.plt"

model {
  network = python("chains:Halves")
}

data {
  source = digits()
}

parallelism {
  pipeline = 2 #! E0434
}
