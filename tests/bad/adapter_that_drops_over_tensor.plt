import "base/gpt.plt"

model {
  adapter = lora(8, ["qkv"], dropout = 0.1)
}

parallelism {
  tensor = 2 #! E0623
}
