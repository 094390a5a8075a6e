import "../base/own.plt"

model {
  network = python("chains:Tempered")
}

data {
  source = digits()
}

devices {
  cpus = 4
}

parallelism {
  pipeline = 2 #! E0720
}
