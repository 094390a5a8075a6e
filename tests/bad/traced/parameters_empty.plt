import "../base/digits.plt"

model {
  network = python("parameters:Net", kind = "empty")
}

devices {
  cpus = 2
}

parallelism {
  zero = 2 #! E0735
}
