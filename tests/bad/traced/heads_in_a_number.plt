import "../base/own.plt"

model {
  network = python("nets:network", fixed = "heads")
}

parallelism {
  tensor      = 2
  tensor_plan = ["attention.[qkv]: column", "attention.out: row"] #! E0428
}
