import "base/gpt.plt"

model {
  adapter = lora(8, ["q_prj"]) #! E0727
}
