"""Short Turkish messages in three categories, written for the tests, and their bytes in three charsets.

The last three of each category are meant to be held out. They are full of dotted and dotless i, many in upper
case, so their words are known only if they are decoded and lowered correctly.
"""

from email.header import Header

CHARSETS = ("windows-1254", "iso-8859-9", "utf-8")
NUM_HELD_OUT = 3  # of each category
LETTERS = {
    "iş": (
        ("Toplantı gündemi", "Yarınki toplantı saat onda başlıyor, gündem ektedir."),
        ("Rapor taslağı", "Raporun taslağını inceleyip görüşlerinizi yazar mısınız?"),
        ("Proje takvimi", "Projenin son teslim tarihi cuma gününe alındı."),
        ("Toplantı notları", "Dünkü toplantının notları ekte, kararlar altı başlıkta toplandı."),
        ("Bütçe onayı", "Yeni projenin bütçesi için müdürün onayı bekleniyor."),
        ("Rapor hakkında", "Müşteri raporu beğendi, yalnız iki tablo daha istiyor."),
        ("Müşteri sunumu", "Sunumu yarın yapacağız, raporun taslağını bu akşam bitirelim."),
        ("İzin talebi", "Yıllık izin talebiniz müdürünüz tarafından onaylandı."),
        ("Proje ekibi", "Proje ekibi bu hafta toplantı yapıyor, gündem ve rapor hazır."),
        ("TOPLANTI YARIN", "TOPLANTI SAAT ONDA. GÜNDEM VE RAPOR TASLAĞI EKTEDİR."),
        ("MÜDÜRÜN ONAYI", "PROJENİN BÜTÇESİ İÇİN MÜDÜRÜN ONAYI BEKLENİYOR."),
        ("Müşteri sunumu", "Müşteri sunumu için raporun taslağını yarın inceleyelim."),
    ),
    "alışveriş": (
        ("Siparişiniz kargoda", "Siparişiniz kargoya verildi, iki gün içinde kapınızda."),
        ("Kışlık indirim", "Kışlık ayakkabılarda yüzde kırk indirim başladı."),
        ("Faturanız", "Siparişinizin faturası ektedir, bizi seçtiğiniz için teşekkürler."),
        ("İade işlemi", "İade ettiğiniz ürün depomuza ulaştı, ücreti kartınıza yatırıldı."),
        ("Sepetinizde ürün kaldı", "Sepetinizdeki ürünler tükenmeden siparişi tamamlayın."),
        ("Hafta sonu indirimi", "Bütün ürünlerde indirim var, kargo ücretsiz."),
        ("Kargo takibi", "Kargonuz şubeye ulaştı, ürün bugün dağıtıma çıkıyor."),
        ("Işıklı ayakkabılar", "Çocuklar için ışıklı ayakkabılar indirimli fiyatla mağazada."),
        ("Kartınız", "Sipariş ücreti kartınızdan alındı, fatura yakında gelecek."),
        ("KIŞLIK İNDİRİM", "IŞIKLI AYAKKABILAR VE KIŞLIK ÜRÜNLER İNDİRİMLİ FİYATLA MAĞAZADA."),
        ("SİPARİŞİNİZ", "SİPARİŞİNİZ KARGOYA VERİLDİ, FATURASI EKTEDİR."),
        ("İade", "İade ettiğiniz ürünün ücreti kartınıza yatırıldı."),
    ),
    "seyahat": (
        ("Uçuş bilgileriniz", "Uçağınız sabah altıda kalkıyor, uçuş kapısı on iki."),
        ("Otel rezervasyonu", "Otel rezervasyonunuz onaylandı, giriş öğleden sonra ikide."),
        ("Biniş kartı", "Biniş kartınız hazır, havalimanına iki saat önce gelin."),
        ("Isparta turu", "Isparta turu için rezervasyon yapıldı, otobüs meydandan kalkıyor."),
        ("Uçuş değişikliği", "Uçuşunuz bir saat ertelendi, yeni uçuş kapısı yolda bildirilecek."),
        ("Bavul hakkı", "Biletinizde yirmi kilo bavul hakkı var, fazlası havalimanında ödenir."),
        ("Otel odanız", "Odanız deniz manzaralı, otelde kahvaltı fiyata dahil."),
        ("Tren bileti", "Tren biletiniz alındı, vagon üç, koltuk on bir."),
        ("Iğdır uçuşu", "Iğdır uçuşu için biniş kartı bu akşam açılıyor, bavul ücretsiz."),
        ("ISPARTA TURU", "ISPARTA OTOBÜSÜ MEYDANDAN KALKIYOR, OTEL REZERVASYONU YAPILDI."),
        ("UÇUŞ KAPISI", "IĞDIR UÇUŞUNUZ ERTELENDİ, BİNİŞ KARTI HAVALİMANINDA."),
        ("Bilet", "Tren ve uçak biletiniz hazır, bavul hakkı yirmi kilo."),
    ),
}  # fmt: skip


def letter(subject: str, text: str, charset: str) -> bytes:
    headers = (
        f"From: Işıl İnci <isil@example.org>\nSubject: {Header(subject, charset).encode()}\n"
        f"MIME-Version: 1.0\nContent-Type: text/plain; charset={charset}\n"
        "Content-Transfer-Encoding: 8bit\n\n"
    )
    return f"{headers}{text}\n".encode(charset)
