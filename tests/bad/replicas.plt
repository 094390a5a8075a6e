import "base/gpt.plt"

parallelism {
  zero     = 3
  replicas = 3 #! E0403
}
