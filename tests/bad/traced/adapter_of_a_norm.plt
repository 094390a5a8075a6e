import "../base/gpt.plt"

model {
  network = python("adapters:Net")
  adapter = lora(4, "norm") #! E0727
}

data {
  source = stdlib(context = 32)
}
