import "base.plt" as base
