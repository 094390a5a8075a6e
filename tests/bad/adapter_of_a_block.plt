import "base/gpt.plt"

model {
  adapter = lora(8, ["attention"]) #! E0727
}
