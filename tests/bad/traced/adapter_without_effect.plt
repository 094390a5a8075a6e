import "../base/gpt.plt"

model {
  network = python("adapters:Net")
  adapter = lora(
    4,
    ["up", "down", "read", "head"], #! W0727 E0728
    save = "haed", #! E0727
  )
}

data {
  source = stdlib(context = 32)
}
