import "base/own.plt"

parallelism {
  tensor      = 2
  tensor_plan = [
    "attention.*: columns", #! E0426
    "up", #! E0426
    "gate: column in parts [4]", #! E0426
    "value: column in parts [4, 0]", #! E0426
    "down: row",
  ]
}
