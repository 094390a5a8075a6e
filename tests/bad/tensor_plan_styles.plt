import "base/own.plt"

parallelism {
  tensor      = 2
  tensor_plan = [
    "attention.*: columns", #! E0426
    "up", #! E0426
    "gate: column in 1 parts", #! E0426
    "down: row",
  ]
}
