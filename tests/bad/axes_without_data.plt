import "base/gpt.plt"

parallelism {
  pipeline = 3 #! E0401
}
