import "../base/own.plt"

model {
  network = python("nets:network", joined = true)
}

parallelism {
  tensor      = 2
  tensor_plan = ["attention.qkv: column", "attention.out: row"] #! E0428
}
