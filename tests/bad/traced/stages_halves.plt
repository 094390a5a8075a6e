import "../base/own.plt"

model {
  network = python("chains:Halves") #! W0642 W0643
}

data {
  source = digits()
}

parallelism {
  pipeline = 2 #! E0434
}
