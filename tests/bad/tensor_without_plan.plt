import "base/own.plt"

parallelism {
  tensor = 2 #! E0415
}
