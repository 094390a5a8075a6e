import "base/own.plt"

parallelism {
  pipeline = 2 #! W0436
}
