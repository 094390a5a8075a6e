import "base/own.plt"

parallelism {
  context = 2 #! E0425
}
