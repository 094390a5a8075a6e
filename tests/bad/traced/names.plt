import "../base/own.plt"

parallelism {
  tensor      = 2
  tensor_plan = [
    "blocks.*.up: column", #! W0426
    "norm: column", #! E0426
    "attention: row", #! E0426
    "down: row",
    "d*: row_of_whole", #! E0426
  ]
}
