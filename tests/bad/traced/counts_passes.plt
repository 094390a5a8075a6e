import "../base/own.plt"

model {
  network = python("chains:Counting")
}

data {
  source = digits()
}

parallelism {
  microbatches = 2 #! W0606 W0437
}
