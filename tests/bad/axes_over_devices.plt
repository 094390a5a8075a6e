import "base/digits.plt"

devices {
  cpus = 4
}

parallelism {
  data = 3 #! E0401
}
