import "base/gpt.plt"

model {
  adapter = lora(8, ["qkv"]) #! E0623
}
