import "base/gpt.plt"

model {
  adapter = lora(8, ["mlp.up"], save = "mlp") #! E0727
}
