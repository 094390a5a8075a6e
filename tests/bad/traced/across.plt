import "../base/own.plt"

parallelism {
  tensor      = 2
  tensor_plan = ["up: column", "between: summed", "down: row"] #! E0428
}
