import "../base/own.plt"

parallelism {
  tensor      = 2
  tensor_plan = [
    "up: column in parts [4, 1, 2]", #! E0426
    "down: row",
  ]
}
