import "../base/own.plt"

parallelism {
  tensor      = 2
  tensor_plan = ["head: gathered"] #! E0429
}
