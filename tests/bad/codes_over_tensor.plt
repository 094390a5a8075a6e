import "../../examples/gpt_cpu.plt"

train {
  optimizer = adamw(state = 8bit)
}

parallelism {
  zero   = 0
  data   = 1
  tensor = 2 #! E0737
}
