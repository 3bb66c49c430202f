def quantization_config(quantizers):
    return {"quant_method": "ongrid", "quantizers": {p: {"grid": str(s.grid), "dynamic": s.dynamic} for p, s in quantizers.items()}}
