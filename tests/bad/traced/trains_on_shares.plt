import "../base/own.plt"

parallelism {
  tensor      = 2
  tensor_plan = ["attention.[qkv]: column", "attention.out: row"] #! E0428
}
